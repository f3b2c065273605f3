"""The figures of the pages as SVG and PDF files, for papers: the same specification, drawn by matplotlib."""
