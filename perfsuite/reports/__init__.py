"""Output for people: the screen, tables, Markdown and pages."""
