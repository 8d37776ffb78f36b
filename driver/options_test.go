// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes/fake"
)

// validOptions returns options that New accepts.
func validOptions(dir string) Options {
	return Options{
		DriverName: "dra-shared.dev", NodeName: "n1", Client: fake.NewClientset(), Hook: "/hook",
		PluginDir: filepath.Join(dir, "plugin"), RegistryDir: filepath.Join(dir, "registry"),
		CDIDir: filepath.Join(dir, "cdi"), RunDir: filepath.Join(dir, "run"),
	}
}

// newUnstarted returns a driver that is not started.
func newUnstarted(t *testing.T, kinds ...Kind) *Driver {
	t.Helper()
	o := validOptions(t.TempDir())
	o.Kinds = kinds
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestOptions_validate(t *testing.T) {
	twice := []Kind{waitingKind{}, waitingKind{}}
	for name, tc := range map[string]struct {
		change func(*Options)
		want   string // "" means that the options are valid
	}{
		"valid":                  {func(*Options) {}, ""},
		"two kinds":              {func(o *Options) { o.Kinds = []Kind{unattachedKind{}, waitingKind{}} }, ""},
		"no driver name":         {func(o *Options) { o.DriverName = "" }, "DriverName is missing"},
		"no node name":           {func(o *Options) { o.NodeName = "" }, "NodeName is missing"},
		"no client":              {func(o *Options) { o.Client = nil }, "Client is missing"},
		"no hook":                {func(o *Options) { o.Hook = "" }, "Hook or Installation is missing"},
		"no plugin directory":    {func(o *Options) { o.PluginDir = "" }, `PluginDir: "" is not an absolute path`},
		"no registry directory":  {func(o *Options) { o.RegistryDir = "" }, `RegistryDir: "" is not an absolute path`},
		"relative CDI directory": {func(o *Options) { o.CDIDir = "cdi" }, `CDIDir: "cdi" is not an absolute path`},
		"no runtime directory":   {func(o *Options) { o.RunDir = "" }, `RunDir: "" is not an absolute path`},
		"a name used twice":      {func(o *Options) { o.Kinds = twice }, `Kinds[1]: the name "waiting" must be unique`},
	} {
		o := validOptions("/dir")
		tc.change(&o)
		err := o.validate()
		if tc.want == "" && err == nil {
			continue
		}
		if tc.want == "" || err == nil || !strings.HasPrefix(err.Error(), "driver option "+tc.want) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}
