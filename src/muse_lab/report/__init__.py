"""Reports: described once as a tree (`tree`), rendered to HTML and to Markdown, and written beside the results."""
