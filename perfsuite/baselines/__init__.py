"""The files of stored runs: read, check, update, merge and write them."""
