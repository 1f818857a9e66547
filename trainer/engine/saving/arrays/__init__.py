"""Arrays in safetensors files, written atomically, and the detection of other kinds of files."""
