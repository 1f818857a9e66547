"""A single step: the functions around the model's `train_step`, `test_step` and `predict_step`, and their programs.

Owns everything between a batch on the devices and a new state with logs. It must not read data, write files, call
callbacks or decide which batches run.
"""
