"""An objective and a condition for Daguerre."""
