"""Categories on the host: hash buckets and vocabularies of strings and integers, with TensorFlow's numbers.

Owns the lookups that the estimators' feature columns and the preprocessing layers share. It knows neither of them.
"""
