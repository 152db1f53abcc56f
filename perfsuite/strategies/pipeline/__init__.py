"""Pipelines by torch.distributed.pipelining, with perfsuite's orders of actions."""
