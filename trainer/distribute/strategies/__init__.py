"""The strategies: each is a mesh, a placement of the state, and a way to reduce."""
