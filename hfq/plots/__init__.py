"""Pictures of what hfq's verbs and `hfq.report` wrote as JSON, as PNG files and as one HTML page."""
