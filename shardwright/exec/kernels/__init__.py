"""What each kind does, in torch: without a compiler, on GPUs, and to test native kernels by."""
