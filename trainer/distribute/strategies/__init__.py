"""Strategies. Each has a mesh, a placement of the state, and a reduction."""
