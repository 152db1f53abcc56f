"""The published reference tables: figures as printed, with source, meaning and label, and which belong to a case."""
