"""The core of a model: its module, strategy, state, configuration and run, which the loop works on.

It calls the steps that users may override, and knows nothing else of `Model`.
"""
