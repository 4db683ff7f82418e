"""The contracts of plug-ins, a file a kind, as tests: `daguerre check NAME` and Daguerre's own tests run them."""
