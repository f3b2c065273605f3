"""Output of the results: terminal, tables, JSON, time line, and the HTML report in html/."""
