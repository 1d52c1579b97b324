import gc
import weakref

from twinkle_core.infra.local_ray import RayLink


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


def test_no_garbage_is_left_for_another_threads_collector_when_ray_shuts_down() -> None:
    garbage: list[weakref.ref[Cyclic]] = []
    alive_at_shutdown: list[bool] = []

    class Ray:
        def shutdown(self) -> None:
            alive_at_shutdown.append(garbage[0]() is not None)

    link = RayLink.__new__(RayLink)
    link._joined, link._local = False, Ray()  # type: ignore[assignment]
    gc.disable()
    try:
        garbage.append(weakref.ref(Cyclic()))
        assert garbage[0]() is not None
        link.close()
    finally:
        gc.enable()
    assert alive_at_shutdown == [False]
