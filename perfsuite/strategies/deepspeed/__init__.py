"""Strategies of DeepSpeed: options, a user's ds_config.json, and the engine on a rank."""
