"""What every layer of the analysis uses: errors, problems, names, intervals, files of tables, progress, processes."""
