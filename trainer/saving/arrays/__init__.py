"""Arrays in safetensors files: written whole or not at all, and what a path is that should have been such a file."""
