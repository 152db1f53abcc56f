"""The files of stored runs: what one holds, how it is read, checked, updated, merged and written."""
