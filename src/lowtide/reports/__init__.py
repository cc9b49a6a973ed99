"""What people read about a plan: text, tables, charts, a page."""
