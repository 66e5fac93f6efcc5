"""Native kernels: C++ without headers of torch, compiled where they run."""
