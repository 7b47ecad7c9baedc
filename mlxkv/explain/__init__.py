"""Attention explained: four labs by hand, the shapes and the bill of a real model, and the weights of its heads."""
