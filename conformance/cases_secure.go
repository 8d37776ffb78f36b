// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// rules returns the rules of the driver's roles.
func (s *suite) rules() (rules []rbac.PolicyRule) {
	if len(s.config.RBAC) == 0 {
		s.skip("the driver's ClusterRoles are not known: set rbac")
	}
	for _, name := range s.config.RBAC {
		raw, err := os.ReadFile(name)
		s.ok(err, "read rbac")
		d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(raw), 4096)
		for {
			var role rbac.ClusterRole
			if err := d.Decode(&role); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				s.fatal("rbac %s: %v", name, err)
			}
			if role.Kind == "ClusterRole" || role.Kind == "Role" {
				rules = append(rules, role.Rules...)
			}
		}
	}
	if len(rules) == 0 {
		s.fatal("rbac %v has no rules of a Role or ClusterRole", s.config.RBAC)
	}
	return rules
}

// writable are the resources that a driver may write.
func writable() []string {
	return []string{"resourceslices", "resourceclaims/status", "resourceclaims/driver", "events"}
}

func caseRBAC(_ context.Context, s *suite) {
	for _, rule := range s.rules() {
		for _, r := range rule.Resources {
			writes := slices.ContainsFunc(rule.Verbs, func(v string) bool {
				return !slices.Contains([]string{"get", "list", "watch"}, v)
			})
			all := slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs)
			switch {
			case slices.Contains(all, "*"):
				s.fatal("a rule has a wildcard: %v %v %v", rule.APIGroups, rule.Resources, rule.Verbs)
			case r == "secrets" || strings.HasPrefix(r, "pods/"):
				s.fatal("a rule permits %v of %s", rule.Verbs, r)
			case writes && !slices.Contains(writable(), r):
				s.fatal("a rule permits %v of %s; a driver writes %v only", rule.Verbs, r, writable())
			}
		}
	}
}

func caseStatusRBAC(_ context.Context, s *suite) {
	found := false
	for _, rule := range s.rules() {
		if !slices.Contains(rule.Resources, "resourceclaims/driver") {
			continue
		}
		for _, v := range rule.Verbs {
			if !strings.HasPrefix(v, "associated-node:") && !strings.HasPrefix(v, "arbitrary-node:") {
				s.fatal("a rule permits %q of resourceclaims/driver; its verbs are associated-node:... and arbitrary-node:...", v)
			}
			found = true
		}
	}
	if !found {
		s.fatal("no rule permits verbs of resourceclaims/driver, without which the driver cannot write status.devices")
	}
}

func caseFileModes(ctx context.Context, s *suite) {
	s.prepared(ctx)
	const othersWrite = 0o002
	i := s.main()
	for _, name := range []string{i.registration, i.endpoint} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		s.ok(err, "look at a socket")
		parent, err := os.Stat(filepath.Dir(name))
		s.ok(err, "look at the directory of a socket")
		// Connecting needs the permission to write. The suite's own directories are closed to
		// others, so that only the mode of the socket counts there.
		closed := s.server == nil && parent.Mode().Perm()&0o001 == 0
		if info.Mode().Perm()&othersWrite != 0 && !closed {
			s.fatal("socket %s has the mode %v: every user can connect", name, info.Mode())
		}
	}
	for _, dir := range []string{s.env.PluginDir, s.env.StateDir} {
		if dir == "" {
			continue
		}
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.Type()&fs.ModeSymlink != 0 {
				return nil //nolint:nilerr // it was removed meanwhile
			}
			if info, err := d.Info(); err == nil && info.Mode().Perm()&othersWrite != 0 {
				return errors.New(path + " has the mode " + info.Mode().String() + ": every user can write it")
			}
			return nil
		})
		s.ok(err, "look at the driver's files")
	}
}
