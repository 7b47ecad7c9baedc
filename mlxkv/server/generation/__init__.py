"""From what an API asks to requests of the engine, and the events of their choices on the way back."""
