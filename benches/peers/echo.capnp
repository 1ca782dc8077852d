@0xb2f1c6a94d0e7335;

interface Echo {
    empty @0 ();
    take @1 (bytes :Data) -> (length :UInt64);
}
