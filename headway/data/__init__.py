"""Prepared data loaders, which are sharded and resume exactly; imported only by the runtime."""
