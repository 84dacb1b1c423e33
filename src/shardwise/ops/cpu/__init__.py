"""Forms that pay on CPUs alone."""
