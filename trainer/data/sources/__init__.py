"""What users pass as data, behind one protocol: arrays, datasets, generators, Grain; and what a batch is."""
