"""Tools: what is done with models and runs beside training, such as reports on them."""
