"""The tables of the published reports out of what runs measured."""
