"""Small things that every part of the analysis may use: errors, problems, names, text and intervals."""
