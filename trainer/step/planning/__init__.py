"""What a compiled step would take on described devices: memory, communication, time.

Owns the arithmetic and the report. It compiles nothing, and knows no models.
"""
