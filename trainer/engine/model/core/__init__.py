"""The core of a model: the module, strategy, state, configuration and run that the loop works on.

It calls the overridable steps, and knows nothing else of `Model`.
"""
