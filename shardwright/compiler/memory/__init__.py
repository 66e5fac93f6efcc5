"""Memory planning: the order of calls, what shares memory, and where all of it is placed."""
