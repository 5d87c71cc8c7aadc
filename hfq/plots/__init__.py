"""Pictures of JSON results, as PNG files and as one HTML page."""
