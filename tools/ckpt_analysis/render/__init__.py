"""What the results look like: terminal, tables, JSON, timeline, and the HTML report in html/."""
