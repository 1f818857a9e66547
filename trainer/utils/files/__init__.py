"""Files from URLs, checked before they are used, and archives that are extracted without leaving their folder."""
