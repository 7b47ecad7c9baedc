"""Whether what is promised holds on this machine: one check a function, and each can fail."""
