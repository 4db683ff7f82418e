"""Parts of verbs that are no verbs themselves."""
