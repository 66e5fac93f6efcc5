"""Workers of a pipeline: in this process, in processes of their own, or under torchrun."""
