"""Pipelines by torch.distributed.pipelining, fed with our orders of actions."""
