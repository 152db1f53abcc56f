"""What every room shares: errors, units, text, files, the mesh, collectives."""
