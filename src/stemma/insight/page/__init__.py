"""The operator's page: its HTML, style and scripts. The lab's reports use the same style."""
