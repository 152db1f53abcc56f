"""What people read: tables for the terminal, and metrics over several cases."""
