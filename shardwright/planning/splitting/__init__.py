"""The splits of least time inside a stage, chosen exactly."""
