"""The inside of report pages: markup, colours, style, and the sections that `shardwise.report.html` offers."""
