"""The `World` that a command or a call acts on, by the name that the door has for it."""

from fastlaunch.lifecycle.world import World as AppContext
from fastlaunch.lifecycle.world import default_context as default_context
from fastlaunch.lifecycle.world import open_launcher as open_launcher
from fastlaunch.lifecycle.world import reconcile_here as reconcile_here

__all__ = ["AppContext", "default_context", "open_launcher", "reconcile_here"]
