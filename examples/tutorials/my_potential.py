"""A potential of your own; Relaxion finds it by the words `my_potential:make`."""

from relaxion.potentials import Morse


def make():
    """Morse's potential with Girifalco and Weizer's numbers for copper (1959).

    An ASE calculator can be returned as well. This one is batched, all structures side by side in one call, which makes
    training quick.
    """
    return Morse(epsilon=0.343, r0=2.866, rho0=1.359 * 2.866)
