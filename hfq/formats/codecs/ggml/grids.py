"""Grids of vectors that IQ1, IQ2, and IQ3 blocks index, and the signs of their elements.

The grids are data of ggml (`ggml-common.h`), which no formula gives. Here each is the set of its vectors: a
bit for every possible vector, compressed. A grid has its vectors in ascending order, with the first element
as the lowest digit.
"""

# The data of the grids is from ggml, under this license:
#
# MIT License
#
# Copyright (c) 2023-2026 The ggml authors
#
# Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
# associated documentation files (the "Software"), to deal in the Software without restriction,
# including without limitation the rights to use, copy, modify, merge, publish, distribute,
# sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in all copies or
# substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
# NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
# NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
# DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
# OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

from __future__ import annotations

import base64
import functools
import zlib

import torch

from hfq.formats.codecs.constants import table

__all__ = ["grid", "signs"]

_GRIDS = {
    "IQ1_S": (
        (-1.0, 0.0, 1.0),
        8,
        "c-k#eO>0z16uqyx#k83y_qA0qE*kA7fk#%6iL;cd<W&+S(JE7AEBc6nlGQ*KX*Z#@1057+gows$6w-}Cbfte_m;o2UY|_#*V"
        "Za~*x^U%6T=`Mm&aUdhx#ygF&eKOplgaU0)cQ?aLaWb`!=%}lC@i-gZEZ5CFdhU_><`D{U2pdIZAiiRBZ^Tjpc--1mjt-&r-"
        "O_l7bZy)3*%3zRUeyRXfJ~s5?<5PM<UK4aB<I3L}>n{hnc{+>K$G67mn>zvR$=UOtZPa7LUsmQWQ2bN)ou!Kj_yfb~LQyR=n"
        "ku)`P+=g=?+GNRyF#AueD^;Yg67k)HG=(os>Uh!rG~(gRxZza2HhyPsM)=qh9|ehXUldkU;_wA!C+2Fv`rcq!34!0Fqz%0;&"
        "7#XeAmBu`}t6ci#>+3WlSwzITy{$0C$RU8lhlWkibbyz6nxOL=l|4%yAAJ4G^LV^S*V!(*CwdNU%)Qrh$#q9cyW*tq|@QQ}j"
        "896#XTv`6q5lhc&*LLPVeEGcad$xT4&D*b^FV9bJ+^}ih*A`2jX2rIue$9q9{)`S!jt!g=X1D{vGEMnukjj}Wcvs!oqc~_d6"
        "1@aP1V3Bvcjc9uWpgt6=l#-;vm1GpU-HX*>(|GJ!F2C{R9{8qA7trFiLFJ0VD+S2Ny_0+jiaiUvPbU!Gt<44HyL$nQ%A{iI)"
        "xZW(;0iU=zRoe)YSg8LFF!L&Ei&Q)FngSxd==b)ez8IIEAq?gCPR1z1`cE#svx$dBcgrdMr~`+vY{G*{j)LdH7J(;|V_S3+r"
        "Eqj0{aUGZ~5`z3=#nUT2ypkIbf^7Qd%#dKF#22&cWI$B=(k{y*i-P-%7a6aqltG8tC11XWn$8wuQe)#`Rb$ezM@h+=MX6ehv"
        "4>@KW-1MD8)wE",
    ),
    "IQ2_XXS": (
        (8.0, 25.0, 43.0),
        8,
        "cmV~$v26oE5Ckw{qQzG+_~^=9T%<A-8miLd@9+HPy;sj`&^Q9+ncR;(&C?jZ!^0BpY0jaP0v&+U8PSjKNG#ZbX&MTHK@7lmm"
        "EZ%g5OB)cFPH%jfLt~ZQ~(g7pa6gc&%AeLPmQ2235g|RF@_Fc0i2ozh1mi{&HF%?rC<R8kYxc13!S1s00nSamOy}D-~+$`1p"
        "rt8006m^piw{p&T9mUVyLhP01LnZbf;hi0$5P704x9i7_a~UilJD50-yi@000FA0Dyn%+$T8",
    ),
    "IQ2_XS": (
        (8.0, 25.0, 43.0),
        8,
        "cmV~$v5CY$5Cp(ttU*x>Z;6YtS?jncmbHYU{HphTfA3k($>)8qvwFwp*R@9Cde3^E+~YdS&J4Bmrl@y+?@6oLF;o*1=zQMab"
        "yn^8{JIvoTwg_So#mv5S_G6KU~f|lUoe0I@7uMAxmvYG6AXV#1r(;yB0#SU(FSNC4S#XHXTAG-kLxTu{#310Ks_h-XtC1+B~"
        "cCT(Md4PQYZk|S-oSZH8v<TsGS*IWPxgEG&7|NLRSEws71QP1psXjDFCAb4L}0{0~mCpo}Fi0Tu)37#Gqo`AFULFKrs+{47r"
        "&Bz@TS($A}P(0F2@fs{su+2mk{E0U8Y_Gayinx}y<;f&u_gjB-Hr02^$G`~xx1U*P",
    ),
    "IQ2_S": (
        (8.0, 25.0, 43.0),
        8,
        "c-n1|F^(l63<XP$EKXtl$l{b15%MVz5%MWFpnK<!cAY-CcrL0cYu8z`D%&n!$9rlkV@_?gtLpTft;(ysr%D;=))YB4t5PFmm"
        "3>l0AY7LMLa)qS=cM<lU1yckd<<K-(e@AUthzv7;f8`#T2GaL8!4C?iUIUIIhMtww;}6pDQN+VPx)`)1Xf^oc{)u&;1~cXm;"
        "fe0tJ+n^KiPJzr{Or3ZVjZWdS%;#8@2H^6i~mB1wB;;gm5E(w(C@RPyRXCf%mO1AWwO?Kq2@7DheR**=MDjC~_W$iUmdhk>5"
        "a7^mPF!O&<wywY*~hB4<zUQ%A6G`GL&yY|(4BJy<^{2Tf@Yd;}{1k$`yV21_7z>9aMRrpnV00Qrx@sejLwfyVU;yqfL^%&A="
        "gEba#bYU02r$OjnmIQ(@p@)nJUW+375X!-+DqMR)",
    ),
    "IQ3_XXS": (
        (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0),
        4,
        "cmV~$v1tQA5CFir=M0CU6Uh0NvH}(G0vEI>60Tx#q%uA8d3FZ3vmc#HeX^hK=DjDBZLHyTCj^)*e%aF5=Vuh14bIL&w93Qb0"
        "R?XdIRS)1pMM$n=`60*_Z~ILH+W;(Y(ugD&Vz~UlbX>gFF0!wLfU{D#7i)-9BkN>HGH`OSkx#l0}~5!VcHbHYz2a(UJfRfKm"
        "=^m6(UFg1xtYCVj+<XSnvW^m=IvYmf*XDfI~qrgPJyllxPc}0N@|aj4w<",
    ),
    "IQ3_S": (
        (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0),
        4,
        "cmV~$(P<P>6adh(!w3(*ULXbBgbl1++{g+Wzb3Nwa})A0`!^8_7=waXM{Gby2|}<6&-wfBx&N5fo7d;ZeY20>U-t9WWa<0$Q"
        "(HItIy=OYYUincF!W)PLjLsB&Ah&>AHB`^Gv|`4`?{KA87pp<>p4Z8?@X67x#TM0<SnK(#}xJQ>vlb^o3HER_7KU9=`PP4zU"
        "OX=8eChp$+l%|s;h63F^xG?FXD3?-(}BZo0Ph&sGTC`+qxa~{ytL7avh@$x`D)G9bt}BWT}fO9{Qf?A$x72+O+Or)iy=GkqE"
        "j*@t}GVb2!D&j*)?=?Dskswb63y2NeUvzyt(#0yvr|<qnO|VvMSm3XHn2&?qAcCg5Zps)fkr9EbZXNwC$~_o5&Kf`kJ62Mj="
        "6hX",
    ),
}
"""For each type: the values of an element, the length of a vector, and the set of vectors."""


def grid(name: str, device: torch.device) -> torch.Tensor:
    """Returns the vectors of a type on a device, float32 [vectors, length]."""
    return table(("grid", name), functools.partial(_make_grid, name), device)


def signs(device: torch.device) -> torch.Tensor:
    """Returns the signs of eight elements by their bits, float32 [256, 8].

    A set bit is negative.
    """
    return table("signs", _make_signs, device)


def _make_grid(name: str) -> torch.Tensor:
    values, length, packed = _GRIDS[name]
    members = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(packed))), dtype=torch.uint8)
    bits = torch.stack([members >> place & 1 for place in range(7, -1, -1)], 1).flatten()
    vectors = bits.nonzero().flatten()
    digits = [vectors // len(values) ** place % len(values) for place in range(length)]
    return torch.tensor(values, dtype=torch.float32)[torch.stack(digits, 1)]


def _make_signs() -> torch.Tensor:
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return 1.0 - 2.0 * bits.to(torch.float32)
