"""Code that every package shares: errors, units, text, files, git, meshes."""
