"""The way from `Model.fit` to a compiled step: the model, the loop, the steps, and the files of a run.

`engine/model` calls `engine/loop`, which runs the phases of `engine/step`. Nothing here is a public name.
"""
