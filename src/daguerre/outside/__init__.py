"""The modules of folders of plug-ins (`daguerre --plugins DIR`, DAGUERRE_PLUGINS): DIR/KIND/NAME.py is the module
daguerre.outside.KIND.NAME, in this process and in those of workers, which find it by the same variable."""

from daguerre import plugins

__path__ = [str(folder) for folder in plugins.folders()]
