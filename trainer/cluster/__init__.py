"""The processes of a job: which there are, how they meet, how they agree, and how the end of one is noticed.

Owns all communication between processes that uses no devices. It must not run collectives, nor know of models, data or
strategies.
"""
